"""Programs and measurements that benchmarks, notebooks, the command line and tests share."""

"""What tests and benchmarks share: references, error bounds, shapes, timing, a direct launcher."""

"""CuTeDSL device code. Importing this imports cutlass: only a compile does.

| File | What it answers |
|---|---|
| `skeleton` | which warp has which role; the loop over tiles; it knows no policy by name |
| `mainloop/` | how A and B get into the ring of stages (producer) and are multiplied (consumer) |
| `tile_scheduler` | which tile a CTA works on next |
| `warp_schedule` | how math warpgroups share tiles and take turns at the tensor cores |
| `finish` | what happens between a tile's multiplication and its epilogue |
| `epilogue/` | how accumulators and operands become results |
| `zero_fill` | who writes the matrices of empty groups |
| `tile_coords` | a CTA's sequence of tiles; where each lies in every tensor map |
| `mailbox` | how one warp tells the others of a cluster which tile is next |
| `tile_counter` | how clusters claim tiles; how the counter is made ready |
| `flags` | how a CTA tells others that what it wrote may be read |
| `shared_memory` | who has which bytes, and which barriers |
| `warp`, `dtypes` | the lanes of a warp for `gemm/group_search.py`; CuTe's types |
| `compile` | spec → cubin |

A policy is a class beside the others of its kind and one line in that kind's table: `PRODUCERS` and
`CONSUMERS`, `TILE_SCHEDULERS`, `WARP_SCHEDULES`, `FINISHES`. The protocol is documented where the
table is, or at its simplest policy. Policies keep no value of the GPU: `setup` and `partition_...`
return frozen views, which the other methods take. The kernel's parameters are listed in
`gemm/kernel_params.py`.
"""

from .compile import compile_cubin as compile_cubin

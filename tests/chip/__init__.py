"""Random products launched by the thousand: direct launches, guarded memory, a check on the GPU."""

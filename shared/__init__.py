"""What the reference scripts and the benchmarks have in common; one subject to a module."""

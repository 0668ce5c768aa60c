"""Benchmarks of what the references do."""

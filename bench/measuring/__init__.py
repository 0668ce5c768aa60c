"""The wing that starts processes: a conductor outside, a worker inside, a journal between."""

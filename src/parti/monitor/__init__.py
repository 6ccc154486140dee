"""What a person sees of a run, and what is kept of it."""

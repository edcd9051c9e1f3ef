"""What fits and how long it takes, said before the run."""

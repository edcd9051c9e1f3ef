"""What this computer is and how fast it is."""

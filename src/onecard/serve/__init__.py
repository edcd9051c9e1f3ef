"""Answers over HTTP and in the terminal."""

"""Compiled programs: read from their text, and priced as scheduled."""

"""Checking a plan against the compiler: what it predicted beside what XLA makes of it."""

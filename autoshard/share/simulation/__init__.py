"""A cluster as discrete events: jobs arrive, run, move and end; nodes fail and are repaired."""

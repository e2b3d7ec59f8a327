"""Several jobs on one cluster: who gets which devices, decided, simulated, and carried out."""

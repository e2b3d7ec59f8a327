"""What XLA makes of a program: what is stored and when, which collectives run, how buffers are packed."""

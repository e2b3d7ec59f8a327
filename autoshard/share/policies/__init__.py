"""What decides who gets which devices: ours, and those that it is compared with."""

"""Which device plays which coordinate of a mesh: a plan's traffic, its price under an order of the devices, and the
search for the order that makes it least.
"""

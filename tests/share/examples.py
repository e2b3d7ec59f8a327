"""Clusters and jobs that tests share."""

import dataclasses

from autoshard.cluster import Cluster
from autoshard.share.footprint import read_footprint, usual_footprints
from autoshard.share.pool import Node, Placement, Taken
from autoshard.share.rates import Rate, Rates
from autoshard.share.situation import Job, JobState, Situation

MIXED = Cluster.from_file("configs/clusters/v100x32_p100x32.yaml")


def nodes(**sizes):
    """`nodes(a=[4, 4], b=[2])`: nodes of groups by their numbers of devices."""
    every = [(group, size) for group, own in sizes.items() for size in own]
    return tuple(Node(number, group, size) for number, (group, size) in enumerate(every))


def job(name, rates, steps=100.0, **others):
    """A job from `{"a:1": 2.0}`."""
    entries = tuple(Rate(read_footprint(at), rate) for at, rate in rates.items())
    return Job(name, steps, Rates(entries), **{"move_s": 0.0, **others})


def power_law(name, exponent, steps, cluster=MIXED, slow=0.6, most=32, **others):
    """A job that runs at k^p on k devices of the first group, and slower on the others."""
    entries = [
        Rate(f, (1.0 if f.parts[0].group == cluster.groups[0].name else slow) * f.num_devices**exponent)
        for f in usual_footprints(cluster, 1, most)
    ]
    return Job(name, steps, Rates(tuple(entries)), **others)


def place(text, *taken):
    """`place("a:2", (0, 2))`: a footprint with devices of nodes."""
    return Placement(read_footprint(text), tuple(Taken(node, devices) for node, devices in taken))


def situation(own_nodes, *jobs, now_s=0.0, running=None):
    """Jobs that wait, or run where `running` says."""
    states = [JobState(one, one.steps) for one in jobs]
    states = [
        dataclasses.replace(state, placement=running[state.job.name], has_run=True)
        if running and state.job.name in running
        else state
        for state in states
    ]
    return Situation(now_s, own_nodes, tuple(states))

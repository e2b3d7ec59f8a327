"""Which sizes of a run are likely to come next."""


def likely_sizes(current: int, least: int, most: int) -> tuple[int, ...]:
    """The numbers of workers that the next generation may have, the likeliest first.

    The same size comes again when a lost worker is replaced; its plan is there already. So: one less, then one more.

    Args:
        current: workers now.
        least, most: the run's size.
    """
    return tuple(size for size in (current - 1, current + 1) if least <= size <= most)

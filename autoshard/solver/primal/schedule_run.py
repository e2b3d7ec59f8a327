"""Runs transfers beside kernels, as `cost/exposure.py` defines it: its loop, compiled."""

import heapq

import numpy as np

from autoshard.solver.kernels import kernel


@kernel()
def run_beside(
    kernels_s: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    left_s: np.ndarray,
    by_start: np.ndarray,
    share: float,
    exposed_s: np.ndarray,
    sent_until: np.ndarray,
    stretches: np.ndarray,
    pieces: np.ndarray,
    shares: np.ndarray,
) -> tuple[int, int]:
    """How many stretches and how many pieces there are. (Allocates nothing, which compiles faster.)

    Args:
      kernels_s: float64 [kernels]. starts, stops: int64 [transfers], ascending by stop; what runs between.
      left_s: float64 [transfers], what each takes; what is left of it in the end. by_start: int64; by rising start.
      share: What transfers make use of, of a kernel's time.
      exposed_s: float64 [transfers], 0; written: what kernels wait for.
      sent_until: int64 [kernels], scratch.
      stretches: int64 [kernels + 1, 2], written: in which more is to be sent than fits.
      pieces: int64 [kernels + transfers, 2], written: the transfer and the kernel of each piece, in order of time.
      shares: float64 [kernels + transfers, 2], written: its begin and end, as shares of the kernel's time.
    """
    count, idle = len(kernels_s), len(kernels_s) + 1
    known = [0]  # a heap; transfers ascend by stop
    known.pop()
    following = num_stretches = num_pieces = 0
    for k in range(count + 1):
        while following < len(by_start) and starts[by_start[following]] <= k:
            heapq.heappush(known, by_start[following])
            following += 1
        waits = False
        while len(known) > 0 and stops[known[0]] <= k:
            c = heapq.heappop(known)
            waits = waits or left_s[c] > 0
            exposed_s[c] = left_s[c]
        if waits:
            start = k
            while True:
                if num_stretches > 0 and stretches[num_stretches - 1, 1] == start:  # what is sent in there is needed
                    num_stretches -= 1  # before k, too
                    start = stretches[num_stretches, 0]
                elif start > 0 and sent_until[start - 1] <= k:
                    start -= 1
                else:
                    break
            stretches[num_stretches, 0], stretches[num_stretches, 1] = start, k
            num_stretches += 1
        if k == count:
            break
        whole_s = room_s = share * kernels_s[k]
        latest = 0
        while room_s > 0 and len(known) > 0:
            c = known[0]
            sent_s = min(room_s, left_s[c])
            pieces[num_pieces, 0], pieces[num_pieces, 1] = c, k
            shares[num_pieces, 0], shares[num_pieces, 1] = 1 - room_s / whole_s, 1 - (room_s - sent_s) / whole_s
            num_pieces += 1
            room_s -= sent_s
            left_s[c] -= sent_s
            latest = stops[c]
            if left_s[c] <= 0:
                heapq.heappop(known)
        sent_until[k] = idle if room_s > 0 else latest
    return num_stretches, num_pieces

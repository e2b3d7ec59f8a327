"""Python's cyclic garbage collector, paused where much is made that stays.

A large program becomes a million small objects that all live on. Whenever enough of them are new, the collector walks
through them in search of cycles, of which there are hardly any: about a third of the time of a trace goes into that.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Pauses the collector; also a decorator. Whatever happens inside, it is as before afterwards.

    What was made inside counts as old at once, so that the collector does not walk through it when it resumes.
    Reference counting, which frees nearly everything, goes on all the time.
    """
    if not gc.isenabled():  # by the caller, or by such a pause around this one
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else the caller has frozen objects, which must stay so
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        gc.enable()

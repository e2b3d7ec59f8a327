"""Mutual TLS between the processes of a run and their coordinator, by JAX.

JAX reads what it needs from environment variables (https://docs.jax.dev/en/latest/501/security.html). Versions up to
0.11.0 do not know them, and would go on without encryption.
"""

import inspect
import os

import jax

from autoshard.errors import ConfigError

VARIABLES = (
    "JAX_MTLS_CERT_FILE",
    "JAX_MTLS_KEY_FILE",
    "JAX_MTLS_CA_FILE",
    "JAX_MTLS_PEER_URI_PREFIX",
    "JAX_DISTRIBUTED_VERIFY_SECURE_CREDENTIALS",
)
"""What a user sets who wants the coordinator's connections secured."""


def check_mutual_tls() -> None:
    """Makes sure that JAX secures the coordinator's connections if its variables ask for it.

    Raises:
        ConfigError: they are set, and this version of JAX does not know them.
    """
    asked = [name for name in VARIABLES if os.environ.get(name)]
    if asked and "mtls_cert_file" not in inspect.signature(jax.distributed.initialize).parameters:
        raise ConfigError(
            f"{', '.join(asked)}: mutual TLS of the coordinator needs a version of JAX after 0.11.0; this is "
            f"{jax.__version__}, which would go on without encryption. Use a newer one, or unset the variables."
        )

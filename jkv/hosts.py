"""Several hosts that run one program on one mesh: how they meet, and how each reads what all hold.

Knows addresses and arrays; nothing of what is computed.
"""

import socket
import time
from typing import Any

import jax
from jax.experimental import multihost_utils

# As long as JAX waits.
_PATIENCE_SECONDS = 300


def connect(
    coordinator_address: str | None, num_processes: int | None = None, process_id: int | None = None
) -> bool:
    """Meet the other processes of this program; before anything touches a device.

    Args:
        coordinator_address: `HOST:PORT` of the first process, which all can reach; "auto" where a Cloud TPU
            or Slurm says it, with the other two; None: there is one process.
        num_processes: processes of the program, one a host or one a device.
        process_id: this one's number, from 0 on.

    Returns:
        Whether this is the first process, the one that prints.

    Raises:
        ValueError: the three do not go together, or the others cannot be met.
    """
    given = (num_processes, process_id)
    if coordinator_address in (None, "auto"):
        if given != (None, None):
            raise ValueError(
                "--num-processes and --process-id go with --coordinator-address HOST:PORT, got them with "
                f"{coordinator_address or 'none'}"
            )
        if coordinator_address is None:
            return True
    elif num_processes is None or process_id is None or not 0 <= process_id < num_processes:
        raise ValueError(
            "--coordinator-address needs --num-processes and a --process-id below it, "
            f"got {num_processes} and {process_id}"
        )
    else:
        host, _, port = coordinator_address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(
                "--coordinator-address must be HOST:PORT or auto, with a port from 1 to 65535, got "
                f"{coordinator_address!r}"
            )
        if process_id > 0:
            _wait_for(host, int(port))
    address = None if coordinator_address == "auto" else coordinator_address
    try:
        jax.distributed.initialize(address, num_processes, process_id)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if address is None:
            raise ValueError(
                "--coordinator-address auto needs a Cloud TPU or Slurm to say where the processes meet, got: "
                f"{reason}; give HOST:PORT with --num-processes and --process-id"
            ) from error
        raise ValueError(
            f"the processes must meet at --coordinator-address {coordinator_address}, got: {reason}"
        ) from error
    return jax.process_index() == 0


def _wait_for(host: str, port: int) -> None:
    """Wait until the first process listens: JAX would end the whole process where it never does."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"the first process must listen at --coordinator-address {host}:{port}, got: {error}"
                ) from error
            time.sleep(0.5)


def fetch(tree: Any) -> Any:
    """Return arrays as NumPy's on every host, those too that are spread over all of them."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)

"""Reading in small pieces.

Knows: asyncio's protocols. Must not know: what is read.
"""

import asyncio

# Bytes that are read in one turn of the event loop: h11 takes 4 microseconds for a chunk of one
# byte, so that asyncio's 256 KiB of them would stop everybody else for 0.2 s.
_READ_BYTES = 8 * 1024


class BoundedReadProtocol(asyncio.BufferedProtocol):
    """Hands on what comes to `data_received`, as a protocol without buffers would get it."""

    _buffer: bytearray

    def data_received(self, data: bytes) -> None:
        raise NotImplementedError

    def get_buffer(self, sizehint: int) -> memoryview:
        self._buffer = bytearray(_READ_BYTES)
        # TLS fills it piece by piece through slices, and a slice of a bytearray is a copy
        return memoryview(self._buffer)

    def buffer_updated(self, nbytes: int) -> None:
        data, self._buffer = bytes(memoryview(self._buffer)[:nbytes]), bytearray()
        self.data_received(data)

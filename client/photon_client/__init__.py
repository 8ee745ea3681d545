"""Client of Photon on Triton: ask a served Moondream-class model about pictures.

from photon_client import Client

with Client("127.0.0.1:8001") as client:
    print(client.query("photo.jpg", "What is this?")["answer"])
    for delta in client.caption("photo.jpg", stream=True)["caption"]:
        print(delta, end="", flush=True)
"""

from photon_client.aio import AsyncClient
from photon_client.client import Client
from photon_client.draw import annotate
from photon_client.errors import Internal, InvalidArgument, PhotonError, PhotonTimeout, Unavailable
from photon_client.stream import AsyncStream, Stream

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Client",
    "Internal",
    "InvalidArgument",
    "PhotonError",
    "PhotonTimeout",
    "Stream",
    "Unavailable",
    "annotate",
]

"""What goes to the store and comes back, as MessagePack arrays; `renew.lua` reads and writes the same."""

from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder

from gateway.fleet.contract import AllowanceShare, ByClass, Demand, PlacesShare, PoolShare


class Renewal(Struct, frozen=True, array_like=True):
    """`held`, `limits` and `untils` say what the replica uses at this moment, in the order of the demand."""

    epoch: int
    """Which life of the store the replica knows; 0: none."""
    lease_ms: int
    wants_lead: bool
    fence: int
    """With which the replica led last, 0 if it never did."""
    wants_signals: bool
    demand: Demand
    held: tuple[ByClass, ...]
    limits: tuple[int, ...]
    untils: tuple[int, ...]
    levels: tuple[int, ...]
    """Of the fleet's allowances as last told, for a store that has lost them."""


class Granted(Struct, frozen=True, array_like=True):
    epoch: int
    replicas: int
    fence: int
    """0: another one leads, or nobody."""
    pools: tuple[PoolShare, ...]
    places: tuple[PlacesShare, ...]
    allowances: tuple[AllowanceShare, ...]


_encoder = Encoder()
_decoder = Decoder(Granted)

packed = _encoder.encode
"""Of a Renewal."""
read_granted = _decoder.decode

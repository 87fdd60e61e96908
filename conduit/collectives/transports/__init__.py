"""Transports: ways for rows between ranks that share no memory, a file each."""

from conduit.collectives.transports.all_to_all import AllToAll
from conduit.collectives.transports.parcel import Network, Parcel, Transfer
from conduit.collectives.transports.point_to_point import PointToPoint
from conduit.collectives.transports.rail import Rail

__all__ = ["AllToAll", "Network", "Parcel", "PointToPoint", "Rail", "Transfer"]

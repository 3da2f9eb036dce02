"""Epilogues: accumulator → results. One job a file."""

from .driver import FusedEpilogue as FusedEpilogue
from .views import CtaView as CtaView
from .views import Parameters as Parameters

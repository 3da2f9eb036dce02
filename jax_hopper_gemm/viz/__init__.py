"""Drawings of kernels' work, made from specs and the kernels' own arithmetic.

    from jax_hopper_gemm import viz
    viz.draw_shared_memory([spec])

`graph_lines`, `shared_memory`, `timeline`, `grouped_tiles` and `clipped_rows` return the facts as
text and data. The drawings need matplotlib (extra "notebooks"); each returns its figure.
"""

from .canvas import plain_colour as plain_colour
from .epilogues import graph_lines as graph_lines
from .fragments import draw_fragment as draw_fragment
from .fragments import draw_staged_tile as draw_staged_tile
from .fragments import draw_stmatrix as draw_stmatrix
from .groups import GroupedTile as GroupedTile
from .groups import draw_group_order as draw_group_order
from .groups import draw_grouped_tiles as draw_grouped_tiles
from .groups import draw_grouped_work as draw_grouped_work
from .groups import grouped_tiles as grouped_tiles
from .memory import Part as Part
from .memory import draw_shared_memory as draw_shared_memory
from .memory import shared_memory as shared_memory
from .routing import draw_routing as draw_routing
from .span_maps import BoxRow as BoxRow
from .span_maps import clipped_rows as clipped_rows
from .span_maps import draw_clipped_rows as draw_clipped_rows
from .span_maps import span_map as span_map
from .timelines import Span as Span
from .timelines import draw_timeline as draw_timeline
from .timelines import timeline as timeline

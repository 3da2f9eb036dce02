"""Reports: which kernel runs a product and why, asked of one product or of a whole program."""

from __future__ import annotations

from .explanation import Explanation as Explanation
from .explanation import explain as explain
from .explanation import explain_gated_linear_unit as explain_gated_linear_unit
from .explanation import supports as supports
from .product_report import FoundProduct as FoundProduct
from .product_report import ProductReport as ProductReport
from .product_report import report_products as report_products

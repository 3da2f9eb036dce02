"""Reports: which kernel runs a product and why, asked of one product or of a whole program."""

from .explain import explain as explain
from .explanation import Explanation as Explanation
from .product_report import FoundProduct as FoundProduct
from .product_report import ProductReport as ProductReport

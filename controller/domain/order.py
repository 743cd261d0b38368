"""What an operator has a node do with its models, and how that goes."""

from pointsman.values import ManageModel as ManageModel
from pointsman.values import MeasureSpeed as MeasureSpeed
from pointsman.values import ModelAction as ModelAction
from pointsman.values import Order as Order
from pointsman.values import OrderPhase as OrderPhase
from pointsman.values import OrderUpdate as OrderUpdate

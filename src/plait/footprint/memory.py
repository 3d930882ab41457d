"""`memory`: what each rank of a plan would hold, found without ranks and without memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from plait.blueprint import Blueprint, draw
from plait.footprint.layers import Traces, as_input, traces_of
from plait.footprint.ledger import Category
from plait.footprint.rehearsal import Batch, Rehearsal, Watcher
from plait.pipeline.precision import DTYPES
from plait.pipeline.values import Value, map_tensors, split, tensors_of
from plait.plan import Plan
from plait.rules import Rules
from plait.schedules.lower import lower
from plait.tensor.losses import Loss, cross_entropy

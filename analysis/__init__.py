"""What weights hold, bit for bit, and what packing them would gain."""

from wcodec.analysis.analyzer import analyze
from wcodec.analysis.cost import GPUS, Gpu, find_gpu
from wcodec.analysis.findings import TensorReport
from wcodec.analysis.report import Report

__all__ = ["GPUS", "Gpu", "Report", "TensorReport", "analyze", "find_gpu"]

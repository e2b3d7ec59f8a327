"""Calibration: measuring the live devices, so that the cost model speaks of them and not of data sheets."""

from autoshard.calibration.run import Calibrated, CalibrationProgress, calibrate

__all__ = ["Calibrated", "CalibrationProgress", "calibrate"]

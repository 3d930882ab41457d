"""Losses. (The tensor-parallel layers will stand here too.)"""

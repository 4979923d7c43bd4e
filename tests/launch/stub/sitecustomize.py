"""Imported by every interpreter that finds this folder in PYTHONPATH: has launchers start a stand-in for servers."""

from hocket.launch import local_crew

local_crew.MODULES["server"] = "standin"

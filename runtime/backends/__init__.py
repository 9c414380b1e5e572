"""runtime/backends"""

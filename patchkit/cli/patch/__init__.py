"""Verbs about source trees and fixes."""

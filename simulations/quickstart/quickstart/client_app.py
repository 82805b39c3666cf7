"""The ClientApp: hosts peers, which keep their data, their models and their privacy ledgers."""

from flower_privdec.flower.apps.client_app import client_app

app = client_app()

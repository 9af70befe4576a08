"""A project with one app, whose database is that of the PG* variables."""

import os
import sys

from django.conf import settings
from django.core.management import execute_from_command_line

settings.configure(
    INSTALLED_APPS=["shop"],
    # Libpq takes the rest from the environment: PGOPTIONS, too. Without a name Django takes "postgres".
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": os.environ["PGDATABASE"]}},
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
)
execute_from_command_line(sys.argv)

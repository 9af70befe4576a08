"""A shop whose orders are fenced, tested by a role that is no superuser."""

import os

SECRET_KEY = "none"
INSTALLED_APPS = ["shop"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": "127.0.0.1",
        "PORT": os.environ["PORT"],
        "USER": "tester",
        "NAME": "shop",
        # It has the extension, which only a superuser can create.
        "TEST": {"TEMPLATE": "with_pg_fence"},
    }
}

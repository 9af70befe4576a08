import os

from django.db import migrations, models
from standstill import stand_still


class Migration(migrations.Migration):
    dependencies = [("shop", "0001_first")]
    operations = [
        migrations.RunPython(lambda apps, schema: stand_still()),
        migrations.AddField("Customer", os.environ.get("COLUMN", "name"), models.TextField(null=True)),
    ]

from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True
    dependencies = []
    operations = [
        migrations.CreateModel(
            "Customer",
            [("id", models.BigAutoField(primary_key=True, auto_created=True, serialize=False, verbose_name="ID")),
             ("name", models.TextField())],
        ),
        migrations.CreateModel(
            "Order",
            [("id", models.BigAutoField(primary_key=True, auto_created=True, serialize=False, verbose_name="ID")),
             ("status", models.TextField(default="new")),
             ("version", models.IntegerField(default=1)),
             ("customer", models.ForeignKey("shop.Customer", on_delete=models.PROTECT))],
            options={"db_table": "orders"},
        ),
        # Below the creation of the table, in the same migration.
        migrations.RunSQL(
            "SELECT fence_protect('orders', lease => 'order:{id}')",
            "SELECT fence_unprotect('orders')",
        ),
    ]

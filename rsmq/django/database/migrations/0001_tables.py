"""The tables of rsmq, as `rsmq sql init` creates them."""

from django.db import migrations

from rsmq.django.database.tables import CreateTables


class Migration(migrations.Migration):
    """They have no models."""

    initial = True
    dependencies: list[tuple[str, str]] = []
    operations = [CreateTables()]

"""Who may come in, and how much of it: classes, tenants, API keys, the bounds of the queue, and quotas."""

from __future__ import annotations

import logging

from headway.config_files.classes import ClassFile, read_class_file
from headway.config_files.tenants import Access, TenantFile, key_digest, read_tenant_file
from headway.server.admission import Admission
from headway.server.edge.in_flight import InFlight
from headway.server.edge.settings import EdgeSettings
from headway.server.quotas import Budgets, TenantQuotas

logger = logging.getLogger("headway.server")


class Door(InFlight):
    """What stands behind an edge and in front of what answers. take_files() has to be called before anything else.

    Attributes:
        keys: what each API key gives access to, by its digest.
        quotas: None where there are no tenants.

    Raises:
        ValueError: the journal of quotas cannot be kept.
    """

    classes: ClassFile
    tenants: TenantFile
    keys: dict[bytes, Access]
    quotas: Budgets | None = None

    def __init__(self, settings: EdgeSettings) -> None:
        super().__init__()
        self._edge = settings
        self.admission = Admission(settings)
        if settings.tenants is not None:
            self.quotas = self._quotas_of(settings.tenants)

    def _quotas_of(self, tenants: TenantFile) -> Budgets:
        return TenantQuotas(tenants.table, self._edge.journal)

    @property
    def has_files(self) -> bool:
        """Whether there is a file of classes or of tenants."""
        return self._edge.service_classes is not None or self._edge.tenants is not None

    def read_files_again(self) -> bool:
        """Take the files as they are now. If one is wrong, all stays as it is, the log says so, and this is False."""
        classes, tenants = self.classes, self.tenants
        try:
            if classes.path:
                classes = read_class_file(classes.path)
            if tenants.path:
                tenants = read_tenant_file(tenants.path)
            tenants.check_classes(classes.table)
            if self.keys and not (self._edge.api_keys or tenants.keys):
                raise ValueError(
                    f"{tenants.path} has no API key left, so everybody would have access; to allow that, restart"
                )
        except ValueError as error:
            logger.error("classes and tenants are unchanged: %s", error)
            return False
        if self.quotas is not None:
            self.quotas.set_tenants(tenants.table)
        self.take_files(classes, tenants)
        names = ", ".join(each.name for each in classes.table)
        logger.info("service classes are now %s; there are %d API keys", names, len(self.keys))
        return True

    def take_files(self, classes: ClassFile, tenants: TenantFile) -> None:
        """Let in whom these files let in."""
        self.classes, self.tenants = classes, tenants
        self.keys = {key_digest(key.encode()): Access() for key in self._edge.api_keys} | tenants.keys
        self.admission.queues.set_classes(classes.table)
        self.admission.queues.set_tenants(tenants.table.weights if self._edge.tenants is not None else None)

    async def keep_quotas(self) -> None:
        """Keep what tenants have used, for ever."""
        if self.quotas is not None:
            await self.quotas.keep(lambda: not self.in_flight)

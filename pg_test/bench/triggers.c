/*
 * The least that a BEFORE ROW trigger in C can do, to measure against: nothing, and one comparison.
 */
#include "postgres.h"
#include "access/htup_details.h"
#include "commands/trigger.h"
#include "executor/spi.h"
#include "fmgr.h"

PG_MODULE_MAGIC;
PG_FUNCTION_INFO_V1(bench_empty);
PG_FUNCTION_INFO_V1(bench_check);

Datum
bench_empty(PG_FUNCTION_ARGS)
{
	TriggerData *data = (TriggerData *) fcinfo->context;

	return PointerGetDatum(data->tg_newtuple);
}

/* The third column, fence bigint, must grow. */
Datum
bench_check(PG_FUNCTION_ARGS)
{
	TriggerData *data = (TriggerData *) fcinfo->context;
	TupleDesc	desc = data->tg_relation->rd_att;
	bool		old_null,
				new_null;
	Datum		old_fence = heap_getattr(data->tg_trigtuple, 3, desc, &old_null);
	Datum		new_fence = heap_getattr(data->tg_newtuple, 3, desc, &new_null);

	if (new_null || (!old_null && DatumGetInt64(new_fence) <= DatumGetInt64(old_fence)))
		ereport(ERROR, (errmsg("stale fencing token")));
	return PointerGetDatum(data->tg_newtuple);
}

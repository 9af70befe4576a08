//! Calls of functions of the schema `fence` by the library itself.
//!
//! Postgres asks for EXECUTE where SQL names a function, not where C calls one. So what an SQL function of ours does
//! in PL/pgSQL can be a function that nobody else may call, and yet run with the rights of its caller.

use crate::errors::{self, Refusal};
use crate::pg::call::args::Args;
use crate::pg::compat;
use crate::pg::own;
use pgrx::pg_sys;
use std::ffi::CStr;

/// A function of the schema `fence`.
pub struct StateFunction {
    oid: pg_sys::Oid,
    argument_types: Vec<pg_sys::Oid>,
}

/// The trigger function `fenced`. Error: 55000 where there is none.
pub fn fenced() -> Result<pg_sys::Oid, Refusal> {
    own::fenced().ok_or_else(|| errors::function_missing("fenced"))
}

impl StateFunction {
    /// The one of that name and number of arguments. Error: 55000 where there is none.
    pub fn find(name: &CStr, arguments: usize) -> Result<Self, Refusal> {
        let oid = own::function(name, arguments)
            .ok_or_else(|| errors::function_missing(&name.to_string_lossy()))?;
        let (mut types, mut count) = (std::ptr::null_mut(), 0);
        // SAFETY: gives back a palloc'd array of so many types.
        let argument_types = unsafe {
            pg_sys::get_func_signature(oid, &mut types, &mut count);
            (0..count as usize).map(|n| *types.add(n)).collect()
        };
        Ok(StateFunction { oid, argument_types })
    }

    /// The type of its n-th argument, from 0.
    pub fn argument_type(&self, n: usize) -> pg_sys::Oid {
        self.argument_types[n]
    }

    /// Calls it for what it does: it returns void. Its errors reach the client as they are.
    pub fn call(&self, outer: Args, arguments: &[Option<pg_sys::Datum>]) {
        // SAFETY: a function that is not asked for rows needs no place for them.
        unsafe { self.run(outer, arguments, std::ptr::null_mut()) };
    }

    /// Calls it, and shows each row of what it returns, a set of rows of so many columns. The values live until the next
    /// row is shown. `outer`, the call that is served, returns a set, too.
    pub fn each_row<const N: usize>(
        &self,
        outer: Args,
        arguments: &[Option<pg_sys::Datum>],
        mut show: impl FnMut([Option<pg_sys::Datum>; N]) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        use pg_sys::SetFunctionReturnMode as Mode;
        // SAFETY: the result is asked for as ExecMakeTableFunctionResult does it, in the context of the outer call, which
        // returns a set: so it has one. Who is to prefer it puts all rows into a tuplestore, and describes them.
        unsafe {
            let outer_rows = (*outer.raw()).resultinfo.cast::<pg_sys::ReturnSetInfo>();
            let row_type = pg_sys::get_func_rettype(self.oid);
            let mut rows = pg_sys::ReturnSetInfo {
                type_: pg_sys::NodeTag::T_ReturnSetInfo,
                econtext: (*outer_rows).econtext,
                expectedDesc: pg_sys::lookup_rowtype_tupdesc_copy(row_type, -1),
                allowedModes: (Mode::SFRM_ValuePerCall
                    | Mode::SFRM_Materialize
                    | Mode::SFRM_Materialize_Preferred) as i32,
                returnMode: Mode::SFRM_ValuePerCall,
                isDone: pg_sys::ExprDoneCond::ExprSingleResult,
                setResult: std::ptr::null_mut(),
                setDesc: std::ptr::null_mut(),
            };
            self.run(outer, arguments, std::ptr::addr_of_mut!(rows).cast());
            if rows.setResult.is_null() {
                return Ok(());
            }
            assert!(rows.returnMode == Mode::SFRM_Materialize);
            assert_eq!((*rows.setDesc).natts as usize, N);
            let slot = pg_sys::MakeSingleTupleTableSlot(
                rows.setDesc,
                std::ptr::addr_of!(pg_sys::TTSOpsMinimalTuple),
            );
            let mut outcome = Ok(());
            while outcome.is_ok()
                && pg_sys::tuplestore_gettupleslot(rows.setResult, true, false, slot)
            {
                pg_sys::slot_getsomeattrs_int(slot, N as i32);
                outcome = show(std::array::from_fn(|n| {
                    (!*(*slot).tts_isnull.add(n)).then(|| *(*slot).tts_values.add(n))
                }));
            }
            pg_sys::ExecDropSingleTupleTableSlot(slot);
            pg_sys::tuplestore_end(rows.setResult);
            outcome
        }
    }

    /// # Safety
    /// `result` must be what a function of its kind takes for it.
    unsafe fn run(
        &self,
        outer: Args,
        arguments: &[Option<pg_sys::Datum>],
        result: *mut pg_sys::Node,
    ) {
        assert_eq!(arguments.len(), self.argument_types.len());
        // SAFETY: the SQL declares arguments of these types; the call is laid out as InitFunctionCallInfoData does it,
        // with room for all arguments; what the function looks up is kept in memory that outlives the call.
        unsafe {
            let mut function = pg_sys::FmgrInfo::default();
            pg_sys::fmgr_info(self.oid, &mut function);
            let header = std::mem::offset_of!(pg_sys::FunctionCallInfoBaseData, args);
            let each = std::mem::size_of::<pg_sys::NullableDatum>();
            let call: pg_sys::FunctionCallInfo =
                pg_sys::palloc0(header + each * arguments.len()).cast();
            (*call).flinfo = &mut function;
            (*call).resultinfo = result;
            (*call).fncollation = (*outer.raw()).fncollation;
            (*call).nargs = arguments.len() as i16;
            for (n, value) in arguments.iter().enumerate() {
                let argument = (*call).args.as_mut_ptr().add(n);
                (*argument).isnull = value.is_none();
                (*argument).value = value.unwrap_or(pg_sys::Datum::from(0));
            }
            if let Some(run) = function.fn_addr {
                compat::guarded(|| run(call));
            }
        }
    }
}

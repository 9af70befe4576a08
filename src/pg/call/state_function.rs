//! Calls of functions of the schema `fence` by the library itself.
//!
//! Postgres checks EXECUTE if SQL names a function, but not if C calls one. So the PL/pgSQL part of an SQL function can
//! be a function that nobody else may call, and still runs with the rights of its caller.

use crate::errors::{self, Report};
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

/// The trigger function `fenced`. Errors: 55000 if there is none.
pub fn fenced() -> Result<pg_sys::Oid, Report> {
    own::fenced().ok_or_else(|| errors::function_missing("fenced"))
}

impl StateFunction {
    /// Finds the function with that name and number of arguments. Errors: 55000 if there is none.
    pub fn find(name: &CStr, arguments: usize) -> Result<Self, Report> {
        let oid = own::function(name, arguments)
            .ok_or_else(|| errors::function_missing(&name.to_string_lossy()))?;
        let (mut types, mut count) = (std::ptr::null_mut(), 0);
        // SAFETY: returns a palloc'ed array of `count` types.
        let argument_types = unsafe {
            pg_sys::get_func_signature(oid, &mut types, &mut count);
            (0..count as usize).map(|n| *types.add(n)).collect()
        };
        Ok(StateFunction { oid, argument_types })
    }

    /// The type of the n-th argument, from 0.
    pub fn argument_type(&self, n: usize) -> pg_sys::Oid {
        self.argument_types[n]
    }

    /// Calls the function; `None` for NULL. Errors in it reach the client unchanged.
    pub fn call(&self, outer: Args, arguments: &[Option<pg_sys::Datum>]) -> Option<pg_sys::Datum> {
        // SAFETY: a function that returns no set needs no result info.
        unsafe { self.run(outer, arguments, std::ptr::null_mut()) }
    }

    /// Calls the function to return the rows of the call that is being served. Both return sets of the same rows; this
    /// one is in PL/pgSQL, which puts all of them into the result set.
    pub fn answer(&self, outer: Args, arguments: &[Option<pg_sys::Datum>]) {
        // SAFETY: the result info is that of a set-returning function.
        unsafe { self.run(outer, arguments, (*outer.raw()).resultinfo) };
    }

    /// # Safety
    /// `result` must be the result info that a function of its kind takes.
    unsafe fn run(
        &self,
        outer: Args,
        arguments: &[Option<pg_sys::Datum>],
        result: *mut pg_sys::Node,
    ) -> Option<pg_sys::Datum> {
        assert_eq!(arguments.len(), self.argument_types.len());
        // SAFETY: the SQL declares arguments of these types; the call is set up as by InitFunctionCallInfoData, with
        // room for all arguments; what the function looks up is stored in memory that outlives the call.
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
            let run = function.fn_addr?;
            let answer = compat::guarded(|| run(call));
            (!(*call).isnull).then_some(answer)
        }
    }
}

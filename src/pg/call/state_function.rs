//! Calls of functions of the schema `fence` by the library itself.
//!
//! Postgres asks for EXECUTE where SQL names a function, not where C calls one. So what an SQL function of ours does
//! in PL/pgSQL can be a function that nobody else may call, and yet run with the rights of its caller.

use crate::pg::call::args::{Answer, Args};
use crate::pg::call::errors::{self, Refusal};
use crate::pg::compat;
use pgrx::pg_sys;
use std::ffi::CStr;

/// A function of the schema `fence`.
pub struct StateFunction {
    oid: pg_sys::Oid,
    argument_types: Vec<pg_sys::Oid>,
}

impl StateFunction {
    /// The one of that name and number of arguments. Error: 55000 where there is none.
    pub fn find(name: &CStr, arguments: usize) -> Result<Self, Refusal> {
        // SAFETY: a catalog look-up by a NUL-terminated name.
        let schema = unsafe { pg_sys::get_namespace_oid(c"fence".as_ptr(), true) };
        let oid = find(schema, name, arguments)
            .ok_or_else(|| errors::state_missing(&format!("{}()", name.to_string_lossy())))?;
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

    /// Calls it in place of the function that serves the call `outer`, whose result type is the same: what it
    /// returns, rows too, is the answer. Its errors reach the client as they are.
    pub fn call(&self, outer: Args, arguments: &[Option<pg_sys::Datum>]) -> Answer {
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
            (*call).resultinfo = (*outer.raw()).resultinfo;
            (*call).fncollation = (*outer.raw()).fncollation;
            (*call).nargs = arguments.len() as i16;
            for (n, value) in arguments.iter().enumerate() {
                let argument = (*call).args.as_mut_ptr().add(n);
                (*argument).isnull = value.is_none();
                (*argument).value = value.unwrap_or(pg_sys::Datum::from(0));
            }
            let Some(run) = function.fn_addr else { return Answer::Null };
            let value = compat::guarded(|| run(call));
            if (*call).isnull {
                Answer::Null
            } else {
                Answer::Value(value)
            }
        }
    }
}

/// The trigger function `fenced` in the schema of the function that serves this call.
pub fn fenced_beside(args: Args) -> Option<pg_sys::Oid> {
    // SAFETY: a call has the function that it calls.
    let schema = unsafe { pg_sys::get_func_namespace((*(*args.raw()).flinfo).fn_oid) };
    find(schema, c"fenced", 0)
}

fn find(schema: pg_sys::Oid, name: &CStr, arguments: usize) -> Option<pg_sys::Oid> {
    let none = pg_sys::Datum::from(0);
    // SAFETY: the list of the functions of that name has so many members, each a row of pg_proc; it is given back.
    unsafe {
        let list = pg_sys::SearchSysCacheList(
            pg_sys::SysCacheIdentifier::PROCNAMEARGSNSP as i32,
            1,
            pg_sys::Datum::from(name.as_ptr()),
            none,
            none,
        );
        let members = (*list).members.as_slice((*list).n_members as usize);
        let oid = members.iter().find_map(|member| {
            let tuple = std::ptr::addr_of_mut!((**member).tuple);
            let form = &*pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_proc>();
            (form.pronamespace == schema && form.pronargs as usize == arguments).then_some(form.oid)
        });
        pg_sys::ReleaseCatCacheList(list);
        oid
    }
}

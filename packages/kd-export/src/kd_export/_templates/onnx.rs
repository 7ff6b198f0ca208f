// Steps `@file@` with ONNX Runtime. Written by `kd-export client`; change it as you like.
//
//   ORT=$(python -c "import onnxruntime as o, os; print(os.path.dirname(o.__file__))")/capi
//   ln -sf "$ORT"/libonnxruntime.so.* libonnxruntime.so.1
//   rustc -O --edition 2021 @client@.rs -o @client@ -C link-arg=./libonnxruntime.so.1 -C link-arg=-Wl,-rpath,'$ORIGIN'
//   ./@client@ @file@
//
// It needs no crate: it calls the C interface by the places of functions in its table, which are
// those of the first version and never change.
use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::mem::transmute;
use std::ptr::null_mut;

type Handle = *mut c_void;

#[repr(C)]
struct Base {
    get_api: unsafe extern "C" fn(u32) -> *const Handle,
    version: unsafe extern "C" fn() -> *const c_char,
}

extern "C" {
    fn OrtGetApiBase() -> *const Base;
}

macro_rules! ort {
    ($api:expr, $place:expr, ($($kind:ty),*) -> $result:ty) => {
        transmute::<Handle, unsafe extern "C" fn($($kind),*) -> $result>(*$api.add($place))
    };
}

struct Tensor {
    name: &'static str,
    dtype: c_int,
    shape: &'static [i64],
    bytes: usize,
    next: bool,
    start: &'static [f64],
}

const TAKES: &[Tensor] = &[
@takes@
];
const GIVES: &[Tensor] = &[
@gives@
];
/// The place of each next state among the outputs, in the order of the state among the inputs.
const NEXT: &[usize] = &[@next@];

/// Whether the file takes NaN for a number.
const LOSES_NAN: bool = @loses_nan@;

/// Numbers of an input or output, in the bytes of its dtype.
pub type Bytes = Vec<u8>;

/// The policy: `step` carries the state, `reset` begins an episode.
pub struct Policy {
    api: *const Handle,
    session: Handle,
    memory: Handle,
    state: Vec<Bytes>,
}

impl Policy {
    /// Load the file and check it.
    pub fn load(path: &str, threads: c_int) -> Result<Policy, String> {
        unsafe {
            let api = ((*OrtGetApiBase()).get_api)(1);
            let (mut env, mut options, mut session, mut memory) =
                (null_mut(), null_mut(), null_mut(), null_mut());
            let word = CString::new("@lower@").unwrap();
            let file = CString::new(path).map_err(|error| error.to_string())?;
            ok(api, ort!(api, 3, (c_int, *const c_char, *mut Handle) -> Handle)(3, word.as_ptr(), &mut env))?;
            ok(api, ort!(api, 10, (*mut Handle) -> Handle)(&mut options))?;
            ok(api, ort!(api, 24, (Handle, c_int) -> Handle)(options, threads))?;
            ok(api, ort!(api, 7, (Handle, *const c_char, Handle, *mut Handle) -> Handle)(env, file.as_ptr(), options, &mut session))?;
            ok(api, ort!(api, 69, (c_int, c_int, *mut Handle) -> Handle)(1, 0, &mut memory))?;
            let mut policy = Policy { api, session, memory, state: vec![] };
            policy.check(TAKES, 30, 33, 36)?;
            policy.check(GIVES, 31, 34, 37)?;
            policy.reset();
            Ok(policy)
        }
    }

    /// Compare the inputs or outputs of the file with those that this program is written for.
    unsafe fn check(&self, wanted: &[Tensor], count_at: usize, type_at: usize, name_at: usize) -> Result<(), String> {
        let (api, session) = (self.api, self.session);
        let (mut count, mut allocator) = (0usize, null_mut());
        ok(api, ort!(api, count_at, (Handle, *mut usize) -> Handle)(session, &mut count))?;
        ok(api, ort!(api, 78, (*mut Handle) -> Handle)(&mut allocator))?;
        if count != wanted.len() {
            return Err(format!("expected {} inputs or outputs, got {count}", wanted.len()));
        }
        for (place, one) in wanted.iter().enumerate() {
            let (mut name, mut kind, mut form) = (null_mut(), null_mut(), null_mut());
            ok(api, ort!(api, name_at, (Handle, usize, Handle, *mut *mut c_char) -> Handle)(session, place, allocator, &mut name))?;
            let found = CStr::from_ptr(name).to_string_lossy().into_owned();
            ok(api, ort!(api, 76, (Handle, Handle) -> Handle)(allocator, name as Handle))?;
            ok(api, ort!(api, type_at, (Handle, usize, *mut Handle) -> Handle)(session, place, &mut kind))?;
            ok(api, ort!(api, 55, (Handle, *mut Handle) -> Handle)(kind, &mut form))?;
            let (mut dtype, mut rank) = (0, 0usize);
            ok(api, ort!(api, 60, (Handle, *mut c_int) -> Handle)(form, &mut dtype))?;
            ok(api, ort!(api, 61, (Handle, *mut usize) -> Handle)(form, &mut rank))?;
            let mut shape = vec![0i64; rank];
            ok(api, ort!(api, 62, (Handle, *mut i64, usize) -> Handle)(form, shape.as_mut_ptr(), rank))?;
            ort!(api, 98, (Handle) -> ())(kind);
            let fits = shape.iter().zip(one.shape).all(|(a, b)| *a < 0 || a == b);
            if found != one.name || dtype != one.dtype || rank != one.shape.len() || !fits {
                return Err(format!("expected `{}` {:?}, got `{found}` {shape:?}", one.name, one.shape));
            }
        }
        Ok(())
    }

    /// Set the state back to what it starts with.
    pub fn reset(&mut self) {
        self.state = TAKES
            .iter()
            .filter(|one| one.next)
            .map(|one| match one.start {
                [] => vec![0; one.bytes],
                numbers => numbers.iter().flat_map(|x| encoded(one.dtype, *x)).collect(),
            })
            .collect();
    }

    /// Run one step on the inputs that are not a state; give the outputs that are not.
    pub fn step(&mut self, inputs: &[Bytes]) -> Result<Vec<Bytes>, String> {
        let (mut given, mut held) = (inputs.iter(), self.state.iter());
        let mut arrays: Vec<Bytes> = vec![];
        for one in TAKES {
            let source = if one.next { held.next() } else { given.next() };
            let array = source.ok_or(format!("input `{}` not found", one.name))?;
            if array.len() != one.bytes {
                return Err(format!("`{}`: expected {} bytes, got {}", one.name, one.bytes, array.len()));
            }
            if LOSES_NAN && decoded(one.dtype, array).iter().any(|x| x.is_nan()) {
                return Err(format!("`{}` holds NaN, which the file takes for a number: put a number there", one.name));
            }
            arrays.push(array.clone());
        }
        let (api, mut takes) = (self.api, vec![null_mut(); TAKES.len()]);
        let mut gives: Vec<Handle> = vec![null_mut(); GIVES.len()];
        let names = |list: &[Tensor]| list.iter().map(|one| CString::new(one.name).unwrap()).collect::<Vec<_>>();
        let (input_names, output_names) = (names(TAKES), names(GIVES));
        let pointers = |list: &[CString]| list.iter().map(|one| one.as_ptr()).collect::<Vec<_>>();
        let (in_pointers, out_pointers) = (pointers(&input_names), pointers(&output_names));
        let mut results = vec![];
        unsafe {
            for (place, one) in TAKES.iter().enumerate() {
                ok(api, ort!(api, 49, (Handle, Handle, usize, *const i64, usize, c_int, *mut Handle) -> Handle)(
                    self.memory, arrays[place].as_mut_ptr() as Handle, one.bytes,
                    one.shape.as_ptr(), one.shape.len(), one.dtype, &mut takes[place]))?;
            }
            let run = ort!(api, 9, (Handle, Handle, *const *const c_char, *const Handle, usize, *const *const c_char, usize, *mut Handle) -> Handle);
            ok(api, run(self.session, null_mut(), in_pointers.as_ptr(), takes.as_ptr(), TAKES.len(),
                out_pointers.as_ptr(), GIVES.len(), gives.as_mut_ptr()))?;
            for (value, one) in gives.iter().zip(GIVES) {
                let (mut data, mut form, mut count) = (null_mut(), null_mut(), 0usize);
                ok(api, ort!(api, 51, (Handle, *mut Handle) -> Handle)(*value, &mut data))?;
                ok(api, ort!(api, 65, (Handle, *mut Handle) -> Handle)(*value, &mut form))?;
                ok(api, ort!(api, 64, (Handle, *mut usize) -> Handle)(form, &mut count))?;
                ort!(api, 99, (Handle) -> ())(form);
                if count as i64 != one.shape.iter().product::<i64>() {
                    return Err(format!("`{}`: another size, {count}", one.name));
                }
                results.push(std::slice::from_raw_parts(data as *const u8, one.bytes).to_vec());
            }
            for value in takes.iter().chain(&gives) {
                ort!(api, 96, (Handle) -> ())(*value);
            }
        }
        self.state = NEXT.iter().map(|place| results[*place].clone()).collect();
        Ok(results.into_iter().zip(GIVES).filter(|(_, one)| !one.next).map(|(x, _)| x).collect())
    }
}

unsafe fn ok(api: *const Handle, status: Handle) -> Result<(), String> {
    if status.is_null() {
        return Ok(());
    }
    let text = ort!(api, 2, (Handle) -> *const c_char)(status);
    let message = CStr::from_ptr(text).to_string_lossy().into_owned();
    ort!(api, 93, (Handle) -> ())(status);
    Err(message)
}

/// Return the bytes of a number in a dtype, by its number in ONNX.
fn encoded(dtype: c_int, x: f64) -> Bytes {
    match dtype {
        1 => (x as f32).to_ne_bytes().to_vec(),
        2 | 9 => vec![x as u8],
        3 => (x as i8).to_ne_bytes().to_vec(),
        5 => (x as i16).to_ne_bytes().to_vec(),
        6 => (x as i32).to_ne_bytes().to_vec(),
        7 => (x as i64).to_ne_bytes().to_vec(),
        _ => x.to_ne_bytes().to_vec(),
    }
}

/// Return the numbers in bytes of a dtype.
fn decoded(dtype: c_int, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        1 => bytes.chunks(4).map(|x| f32::from_ne_bytes(x.try_into().unwrap()) as f64).collect(),
        2 | 9 => bytes.iter().map(|x| *x as f64).collect(),
        3 => bytes.iter().map(|x| *x as i8 as f64).collect(),
        5 => bytes.chunks(2).map(|x| i16::from_ne_bytes(x.try_into().unwrap()) as f64).collect(),
        6 => bytes.chunks(4).map(|x| i32::from_ne_bytes(x.try_into().unwrap()) as f64).collect(),
        7 => bytes.chunks(8).map(|x| i64::from_ne_bytes(x.try_into().unwrap()) as f64).collect(),
        _ => bytes.chunks(8).map(|x| f64::from_ne_bytes(x.try_into().unwrap())).collect(),
    }
}

const RANGES: &[(f64, f64)] = &[@ranges@];

/// Return numbers that are the same in every language, to compare.
fn drawn(step: i64, place: usize) -> Bytes {
    let (one, (low, high)) = (&TAKES[place], RANGES[place]);
    let count: i64 = one.shape.iter().product();
    let number = |i: i64| {
        let part = ((step * 7919 + place as i64 * 104729 + i * 1299709 + 12345) % 10007) as f64 / 10007.0;
        match one.dtype {
            9 => if part < 0.5 { 1.0 } else { 0.0 },
            1 | 11 => low + (high - low) * part,
            _ => low + ((high - low + 1.0) * part).floor(),
        }
    };
    (0..count).flat_map(|i| encoded(one.dtype, number(i))).collect()
}

const NAMES: &[&str] = &[@names@];

fn run() -> Result<(), String> {
    let path = std::env::args().nth(1).unwrap_or("@file@".to_string());
    let mut policy = Policy::load(&path, 1)?;
    for step in 0..@steps@ {
        if step == @reset@ {
            policy.reset(); // where an episode begins
        }
        let places = (0..TAKES.len()).filter(|place| !TAKES[*place].next);
        let inputs: Vec<Bytes> = places.map(|place| drawn(step, place)).collect();
        let results = policy.step(&inputs)?;
        let given: Vec<&Tensor> = GIVES.iter().filter(|one| !one.next).collect();
        for ((one, name), result) in given.iter().zip(NAMES).zip(results) {
            for (i, x) in decoded(one.dtype, &result).iter().enumerate() {
                println!("{step} {name} {i} {x:.9e}");
            }
        }
    }
    Ok(())
}

fn main() {
    if let Err(message) = run() {
        eprintln!("{message}");
        std::process::exit(1);
    }
}

//! Commands that only begin a request: `aio_read`, `aio_write`.

use super::call::{Call, Outcome, fail};
use super::numbers::{lengths, offset, pattern};
use super::report::{ReportStyle, dump_text, request_text};
use super::requests::{READ_FILL, WRITE_FILL, bytes_of, refuse, style};
use super::state::{OpenImage, State};
use super::words::Parsed;
use crate::failure::Failure;
use crate::output::stdout;
use crate::values::Discard;
use std::future::Future;
use std::time::Instant;
use zebu_disks::errno_text;
use zebu_engine::storage::IoBufs;
use zebu_engine::{Durability, ZeroMode};

/// The option with which qemu-io tests its own accounting.
const INVALID_REQUEST: (char, &str) = ('i', "requests are not accounted");

/// Runs `request` beside the commands that follow; it yields what it has to tell.
fn begin(state: &State, request: impl Future<Output = String> + 'static) {
    let failed = std::rc::Rc::clone(&state.output_failed);
    let task = state.session.worker().spawn(async move {
        let text = request.await;
        if stdout::print(&text).is_err() {
            failed.set(true);
        }
    });
    state.pending.borrow_mut().push(task);
}

/// Offset and lengths of a vectored command.
fn range(parsed: &Parsed<'_>) -> Option<Result<(u64, Vec<usize>), String>> {
    let (offset_text, length_texts) = parsed.operands.split_first().filter(|(_, rest)| !rest.is_empty())?;
    Some(offset(offset_text).and_then(|start| Ok((start, lengths(length_texts)?))))
}

fn buffers(state: &State, lengths: &[usize], byte: u8) -> IoBufs {
    let mut bufs = IoBufs::new();
    for &length in lengths {
        bufs.push_part(state.buffer(length, byte));
    }
    bufs
}

pub(crate) fn read(state: &State, open: &OpenImage, call: &Call<'_>) -> Result<Outcome, Failure> {
    let Some(parsed) = call.options("CP:iqrv")? else { return Ok(Outcome::Failed) };
    if refuse(call, &parsed, &[INVALID_REQUEST]) {
        return Ok(Outcome::Failed);
    }
    let byte = match parsed.value('P').map(pattern).transpose() {
        Ok(byte) => byte,
        Err(message) => return fail(&message),
    };
    let (start, lengths) = match range(&parsed) {
        Some(Ok(range)) => range,
        Some(Err(message)) => return fail(&message),
        None => return call.usage(),
    };
    let bufs = buffers(state, &lengths, READ_FILL);
    let (style, dump) = (style(&parsed), parsed.has('v'));
    let (image, worker) = (open.image.clone(), state.session.worker().clone());
    begin(state, async move {
        let begun = Instant::now();
        let (result, bufs) = image.read(&worker, start, bufs).await;
        let elapsed = begun.elapsed();
        if let Err(error) = result {
            return format!("readv failed: {}\n", errno_text(error.errno()));
        }
        let mut text = String::new();
        let bytes = if byte.is_some() || dump { bytes_of(&bufs) } else { Vec::new() };
        if byte.is_some_and(|byte| bytes.iter().any(|&read| read != byte)) {
            text = format!("Pattern verification failed at offset {start}, {} bytes\n", bytes.len());
        }
        if dump && style != ReportStyle::Quiet {
            text.push_str(&dump_text(start, &bytes));
        }
        text.push_str(&request_text("read", start, bufs.len() as u64, elapsed, style));
        text
    });
    Ok(Outcome::Done)
}

pub(crate) fn write(state: &State, open: &OpenImage, call: &Call<'_>) -> Result<Outcome, Failure> {
    let Some(parsed) = call.options("CfiP:qruz")? else { return Ok(Outcome::Failed) };
    if refuse(call, &parsed, &[INVALID_REQUEST]) {
        return Ok(Outcome::Failed);
    }
    let zeroes = parsed.has('z');
    if zeroes && parsed.operands.len() > 2 {
        return fail("-z supports only a single length parameter");
    }
    if parsed.has('u') && !zeroes {
        return fail("-u requires -z to be specified");
    }
    if zeroes && parsed.has('P') {
        return fail("-z and -P cannot be specified at the same time");
    }
    let byte = match parsed.value('P').map_or(Ok(WRITE_FILL), pattern) {
        Ok(byte) => byte,
        Err(message) => return fail(&message),
    };
    let (start, lengths) = match range(&parsed) {
        Some(Ok(range)) => range,
        Some(Err(message)) => return fail(&message),
        None => return call.usage(),
    };
    let total: u64 = lengths.iter().map(|&length| length as u64).sum();
    let bufs = if zeroes { IoBufs::new() } else { buffers(state, &lengths, byte) };
    let style = style(&parsed);
    let durability = if parsed.has('f') { Durability::Durable } else { Durability::Volatile };
    let mode = if parsed.has('u') && open.discard(&state.defaults) == Discard::Unmap {
        ZeroMode::Unmap
    } else {
        ZeroMode::Keep
    };
    let (image, worker) = (open.image.clone(), state.session.worker().clone());
    let damage = state.session.damage().clone();
    begin(state, async move {
        let begun = Instant::now();
        let result = if zeroes {
            match (image.write_zeroes(&worker, start, total, mode).await, durability) {
                (Ok(()), Durability::Durable) => image.flush(&worker).await,
                (result, _) => result,
            }
        } else {
            image.write(&worker, start, bufs, durability).await.0
        };
        let elapsed = begun.elapsed();
        match result {
            Ok(()) => request_text("wrote", start, total, elapsed, style),
            Err(error) => {
                damage.tell(&error);
                format!("aio_write failed: {}\n", errno_text(error.errno()))
            }
        }
    });
    Ok(Outcome::Done)
}

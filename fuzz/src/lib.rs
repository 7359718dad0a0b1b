//! What the targets do with their bytes. Also called by the plain loop (`examples/steady.rs`), which needs
//! neither nightly nor libFuzzer.

#[path = "../../tests/src/hostile/base.rs"]
pub mod base;
pub mod clients;
pub mod image;
mod limits;
pub mod tables;
pub mod words;

// The command's own parsers, which are in a program and not in a library.
#[allow(dead_code)]
#[path = "../../crates/cli/src/serve/control_request.rs"]
mod control_request;
#[allow(dead_code)]
#[path = "../../crates/cli/src/image_opts.rs"]
mod image_opts;
#[allow(dead_code)]
#[path = "../../crates/cli/src/image_spec.rs"]
mod image_spec;
#[allow(dead_code)]
#[path = "../../crates/cli/src/keyval.rs"]
mod keyval;
#[allow(dead_code)]
#[path = "../../crates/cli/src/io/numbers.rs"]
mod numbers;
#[allow(dead_code)]
#[path = "../../crates/cli/src/io/words.rs"]
mod options;
#[allow(dead_code)]
#[path = "../../crates/cli/src/size.rs"]
mod size;
#[allow(dead_code)]
#[path = "../../crates/cli/src/values.rs"]
mod values;

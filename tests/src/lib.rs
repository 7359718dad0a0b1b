//! Helpers of the black-box tests: programs and scratch directories, images made by QEMU in every shape, a model of a
//! disk, seeded streams of operations, and a driver that runs them through zebu's library.

pub mod device;
pub mod driver;
pub mod encrypted;
pub mod fault_proxy;
pub mod filled_disk;
pub mod growth;
pub mod guest;
pub mod handed_over;
pub mod hostile;
pub mod images;
pub mod lanes;
pub mod message_fuzz;
pub mod model;
pub mod mount;
pub mod nbd_client;
pub mod object_store;
pub mod patch;
pub mod program;
pub mod qemu;
pub mod random;
pub mod recorder;
pub mod rewriting;
pub mod run;
pub mod scratch;
pub mod second_reader;
pub mod server;
pub mod stream;
#[cfg(target_arch = "x86_64")]
pub mod taken_over;
pub mod thread_stress;
pub mod usage;
pub mod vhost_guest;
pub mod web_proxy;
pub mod web_server;

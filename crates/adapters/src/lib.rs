//! Disks of zebu behind the interfaces by which virtual machine monitors use disk formats, for authors of monitors to read and
//! to copy.
//!
//! The interfaces are restated here (names and signatures, with types of this crate in place of the monitors' own), so that the
//! adapters are compiled and tested without the monitors.

pub mod cloud_hypervisor;
pub mod crosvm;
mod seat;

//! Examinations of the device, and faults that they have to find.

use blackburn::{
    DeviceChoice,
    doctor::{
        self, DoctorError, Examination, Options,
        faults::{Fault, VARIABLE},
    },
    verdicts::{self, Found, Record},
};
use blackburn_doctor::groups::{Extent, groups};
use blackburn_tests::on_device;
use libtest_mimic::{Failed, Trial};
use std::{
    sync::{Mutex, mpsc},
    thread,
};

pub(crate) fn trials() -> Vec<Trial> {
    let trial = |name: &str, test: fn(DeviceChoice) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("doctor::{name}"), move || {
            on_device(|client| {
                test(match client.name() {
                    "cuda" => DeviceChoice::Cuda(0),
                    _ => DeviceChoice::WebGpu,
                })
            })
        })
    };
    vec![
        trial("a_quick_examination_passes_and_is_kept", passes),
        trial("every_planted_fault_is_found_and_the_next_group_passes", faults),
        trial("a_device_that_does_not_open_is_told", does_not_open),
        trial("what_cannot_be_examined_is_told", bad_input),
    ]
}

fn quick(only: Option<&str>) -> Options {
    Options { quick: true, only: only.map(String::from), jobs: Some(2), ..Options::default() }
}

fn examine(device: DeviceChoice, options: &Options) -> Result<Examination, DoctorError> {
    doctor::examine(device, options, |_, _, _, _| {})
}

/// All groups, and the file of verdicts.
fn passes(device: DeviceChoice) -> Result<(), Failed> {
    let (mut told, mut last) = (0, (0, 0));
    let examination = doctor::examine(device, &quick(None), |_, _, done, of| {
        told += 1;
        last = (done, of);
    })?;
    if !examination.is_well() {
        return Err(examination.to_string().into());
    }
    let found = &examination.record.verdicts;
    let all = groups(Extent::Quick).len();
    if (found.len(), told, last) != (all, all, (all, all)) {
        return Err(format!("{} groups, told of {told}, last {last:?}", found.len()).into());
    }
    // What every device has in f32.
    let in_f32 = found.iter().filter(|(name, _)| name.ends_with("/portable/f32"));
    for (name, kept) in in_f32 {
        if kept.found != Found::Passed || kept.elements == 0 {
            return Err(format!("{name}: {kept:?}").into());
        }
    }
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("verdicts.json");
    verdicts::keep(&path, &examination.record)?;
    let names = |record: &Record| -> Vec<(String, Found)> {
        record.verdicts.iter().map(|(name, kept)| (name.clone(), kept.found)).collect()
    };
    match verdicts::read(&path)?.as_slice() {
        [kept] if names(kept) == names(&examination.record) && !kept.complete => Ok(()),
        other => Err(format!("{other:?} was kept").into()),
    }
}

/// The group with the fault, and another.
const FAULTY: &str = "column_sum/portable/f32";
const SOUND: &str = "column_sum/portable/f16";

/// What becomes of each fault. All are examined at once: most of the time, processes start.
fn faults(device: DeviceChoice) -> Result<(), Failed> {
    let planted = Fault::ALL.into_iter().filter(|fault| *fault != Fault::NoStart);
    let planted: Vec<(Fault, Options)> = planted
        .map(|fault| {
            let value = fault.planted_in(FAULTY)?;
            let options = Options {
                jobs: Some(1),
                // Long enough for a busy machine to open the device and compile a kernel.
                limit_s: 20,
                variables: vec![(VARIABLE.into(), value)],
                ..quick(Some("column_sum/portable"))
            };
            Ok((fault, options))
        })
        .collect::<Result<_, Failed>>()?;
    let (sender, found) = mpsc::channel();
    let next = Mutex::new(planted.iter());
    thread::scope(|scope| {
        for _ in 0..3 {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                loop {
                    let fault = next.lock().ok().and_then(|mut next| next.next());
                    let Some((fault, options)) = fault else { break };
                    if sender.send((*fault, examine(device, options))).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
    });
    let mut seen = 0;
    for (fault, examination) in found {
        let examination = examination?;
        let verdicts = &examination.record.verdicts;
        let (Some(faulty), Some(sound)) = (verdicts.get(FAULTY), verdicts.get(SOUND)) else {
            return Err(format!("{fault:?}: groups are missing: {verdicts:?}").into());
        };
        let expected = match fault {
            Fault::Hang => Found::Hung,
            Fault::Garbled => Found::Broken,
            Fault::Abort | Fault::Exit => Found::Crashed,
            // CUDA reports it, and a software device dies of it.
            Fault::IllegalAddress if device == DeviceChoice::WebGpu => Found::Crashed,
            _ => Found::Wrong,
        };
        if faulty.found != expected || examination.is_well() {
            return Err(format!("{fault:?} was found as {faulty:?}, not as {expected:?}").into());
        }
        if !sound.found.is_well() {
            return Err(format!("{fault:?} spoiled the next group: {sound:?}").into());
        }
        seen += 1;
    }
    // Among them a hang and a write to nowhere.
    if seen == planted.len() && seen >= 10 { Ok(()) } else { Err(format!("{seen} faults").into()) }
}

fn does_not_open(device: DeviceChoice) -> Result<(), Failed> {
    let variables = vec![(VARIABLE.into(), Fault::NoStart.planted_in(FAULTY)?)];
    let options = Options { limit_s: 2, variables, ..quick(Some(FAULTY)) };
    match examine(device, &options) {
        Err(DoctorError::DeviceFailed { reason, .. }) if reason.contains("within 2 s") => Ok(()),
        other => Err(format!("{other:?}").into()),
    }
}

fn bad_input(device: DeviceChoice) -> Result<(), Failed> {
    let refused = |device, options: &Options, expected: &str| match examine(device, options) {
        Err(error) if error.to_string().contains(expected) => Ok(()),
        other => Err(Failed::from(format!("expected `{expected}`, got {other:?}"))),
    };
    refused(device, &quick(Some("matmull")), "no group's name contains `matmull`")?;
    refused(DeviceChoice::Flex, &quick(None), "choose a GPU")?;
    // No machine has so many.
    refused(DeviceChoice::Vulkan(99), &quick(None), "vulkan:99")?;
    refused(DeviceChoice::Cuda(99), &quick(None), "cuda:99")
}
